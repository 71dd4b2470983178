"""The host loop, the executors that carry out its plans, and the device code they run."""
