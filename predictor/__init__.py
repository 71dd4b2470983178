"""How long will the answer be: the length predictor goes here. Nothing yet."""
