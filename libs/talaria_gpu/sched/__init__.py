"""Whose turn it is: pure scheduling of slots. Imports without torch; the simulator and the router may run it."""
