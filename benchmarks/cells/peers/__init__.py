"""Other systems on the same requests and weights, each in an environment of its own."""
