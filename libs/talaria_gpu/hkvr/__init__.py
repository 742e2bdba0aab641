"""The host KV registry: session prefixes that outlive a switch of models (3.5, 4.3, B, C).

    descriptor  what a model's KV block looks like in host memory
    keys        names of blocks: identity of the model, salt of the tenant, hash of all tokens up to there
    agreement   the prefix that all ranks have
    slabs       one pool of bytes for blocks of all models and families
    registry    which blocks are there, who holds them, which go first
    transfer    rows on the device <-> blocks in host memory (needs torch)
    streams     copies beside the computation, in order, with an end to wait for (needs torch)
    store       `HostKv`: all of it together, for one rank (needs torch)

The first five import no torch. Nothing here knows SGLang; `engine.sglang` brings rows and publishes what is restored.
"""
