"""The host's time for a step, and the accuracy of simulated runs."""
