"""Agent sessions as data: traces, converters, a generator, and their replay.

May import every core of ours; nothing imports it but the CLI.
"""
