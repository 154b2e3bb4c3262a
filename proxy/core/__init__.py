"""What should happen, decided without I/O: no await, no clock, no randomness."""
