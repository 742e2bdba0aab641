"""Engines: the contract, the slot driver, and the two executors (real SGLang, and a device model)."""
