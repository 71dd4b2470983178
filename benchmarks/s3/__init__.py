"""Tables 2 to 4 and figures 4d and 5 of the S3 paper, simulated."""
