"""The accuracy of predicted answer lengths."""
