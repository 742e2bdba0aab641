"""One inference instance: bus I/O and text in one process, the engine in its own."""
