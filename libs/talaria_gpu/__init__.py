"""One inference instance's inside: scheduling, text, memory and engines. Knows neither the bus nor HTTP.

`sched`, `text` and `engine.contract` import without torch, so that a router or a simulator may run them.
"""
