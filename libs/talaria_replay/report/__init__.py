"""The paper's figures and tables beside simulated ones: experiments are data (`experiments/paper.toml`).

`spec` reads them, `run` simulates, `markdown` and `figures` show. matplotlib is needed for the figures only.
"""
