"""What every part of Talaria shares: wire schemas, subjects, bus, clock, settings, errors, logging, metrics.

Imports nothing else of ours and no torch; every service, library and the CLI may import it.
"""

__version__ = "0.1.0"
