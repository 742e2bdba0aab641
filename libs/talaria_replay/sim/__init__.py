"""The simulator: production cores of api, router, telemetry, instance and slot scheduler in virtual time (DESIGN 9).

`profiles` describes hardware and models, `device` turns them into times, `events` is the event heap, `instance`, `mesh`
and `clients` wire the cores together, `laws` checks what must hold in every run. No rule of the product is here.
"""
