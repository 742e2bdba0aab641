"""One inference instance: bus I/O and text in one process, the engine in its own (DESIGN 2).

`core.InstanceCore` decides, without I/O; `service.InstanceService` carries out what it decides. Neither imports torch:
the engine is another process (`talaria_gpu.engine.worker`) at the end of a socket. `python -m talaria_instance` is it.
"""
