"""One replay on systems that people run today, beside Talaria, in one run on one machine.

    python -m bench.compare [TRACE] [--sessions N] [--calls N] [--runs N] [--systems A,B] [--quick]

talaria and round_only are one cold instance with three models, over HTTP; plain is one SGLang server per model, all
resident; sglangmux is a swap-on-demand server from PyPI over the same SGLang servers, and sglangmux_emulated the same
with a reload of the weights that takes as long as Talaria's emulated link. TRACE is as for `bench.ablation`.
"""
