"""Other systems on the same requests and weights, each in its own environment."""
