"""The HTTP edge: who calls, which session, is it valid; asks for a place, sends the body there, streams back.

Stateless but for the calls in flight. `call` is the core of one call (sans-I/O), `link` its bus side, `endpoint` its
HTTP side; `app` composes them. Imports talaria_common and nothing else of ours.
"""
