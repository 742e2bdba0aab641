"""Does the simulator say what the real engine does: the same sessions on both, with profiles measured on this machine.

    python -m bench.agree [TRACE …] [--held-out TRACE …] [--runs N] [--calls N] [--issues N] [--quick]

The real side is `bench.ablation`'s: SGLang on the CPU with three small models, under each of the five configurations,
in closed loop. The simulated side gets what `bench.agree.child` measures of the same engine, and no end-to-end figure.
"""
