"""Time that the host takes for a step, and how well simulations predict runs."""
