"""Fixed replay of a trace against a live, OpenAI-compatible endpoint (5.1, appendix A).

`prompts` makes the conversation of a session, `client` makes one call, `run` releases the calls in closed loop,
`results` keeps what was measured. Needs httpx; nothing here imports a service.
"""
