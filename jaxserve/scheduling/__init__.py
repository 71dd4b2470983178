"""Decides what the device does next: pure Python and NumPy, never JAX.

`Scheduler` owns the sequences and plans one step after another (`StepPlan`). A `Policy` makes its
choices. The same objects drive a device and the simulator.
"""
