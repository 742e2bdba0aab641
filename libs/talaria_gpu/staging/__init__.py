"""Staging the next model's weights in the active one's idle KV pages, and gathering them at a switch (3.5, 4.4).

    plan       where chunks go, and the order of a switch's copies: pure
    chunks     the bitmap of one staging: pure
    stager     writes chunks while calls run, gives pages back when they need them
    low_first  the order in which an allocator gives its pages, the high ones on loan (needs torch)
    gather     carries a switch's plan out on two streams

`plan` and `chunks` import without torch; `talaria_gpu.streams` runs the copies. Nothing here knows SGLang.
"""
