"""What is true of the instances: collects, ages and republishes snapshots; metrics; the event stream."""
