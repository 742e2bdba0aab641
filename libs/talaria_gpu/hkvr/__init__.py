"""The host KV registry: session prefixes that outlive a switch of models (3.5, 4.3, B, C).

    descriptor  what a model's KV block looks like in host memory
    keys        names of blocks: identity of the model, salt of the tenant, hash of all tokens up to there
    agreement   what all ranks have, and what has completed on all of them
    gloo        how the ranks' processes do that (needs torch)
    slabs       one pool of bytes for blocks of all models and families
    block       one of them, and what is counted
    registry    which blocks are there, who holds them, which go first
    states      recurrent states in the registry: each of one exact prefix
    transfer    rows on the device <-> blocks in host memory (needs torch)
    moves       copies with checksums, made beside the copies (needs torch)
    figures     what an engine tells of it
    records     what `HostKv` takes and gives (needs torch)
    store       `HostKv`: all of it together, for one rank (needs torch)

All that need no torch import none; `talaria_gpu.streams` runs the copies. Nothing here knows SGLang; `engine.sglang`
brings rows and publishes what is restored.
"""
