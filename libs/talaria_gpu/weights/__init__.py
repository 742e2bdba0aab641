"""Host images of models' weights, in the form in which they lie on the device (DESIGN 7, appendix D).

    memory      host memory that a device can copy from
    store       a bounded number of bytes of images; the rest on disk, read back in the background
    checkpoint  the models' own files: whole, and read ahead
    files       image files that vanish with the process, and are checked when read

Nothing here knows SGLang.
"""
