"""The `talaria` command: one module per subcommand, `up/` supervises a whole mesh on one machine.

May import talaria_common; the services are started as processes, never imported. Imports inside commands are lazy, so
that the command line answers at once.
"""
