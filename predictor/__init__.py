"""How long will the answer be: length buckets, and later the classifier that fills them."""
