"""Deciding what the device does next: pure Python and NumPy, never JAX.

`Scheduler` holds the sequences and turns them into one `StepPlan` after another; a `Policy` names
the four choices it makes on the way. The same objects drive a device and the simulator.
"""
