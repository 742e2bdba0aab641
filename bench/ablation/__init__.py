"""The five configurations side by side on real SGLang: agent sessions in closed loop on one cold instance (5.2, 5.5).

    python -m bench.ablation [TRACE] [--calls N] [--runs N] [--quick]

TRACE is a trace in the project's format or one of the public files that `talaria_replay.convert` reads. Otherwise
$TALARIA_TRACES names it, or a folder that holds one; without either, sessions of the paper's published shape are made.
"""
