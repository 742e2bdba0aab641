"""What is true of the instances: collects, ages and republishes snapshots; metrics; the event stream.

`core` judges and touches neither bus, clock nor event loop; `shell` feeds it and publishes what it says.
"""
