"""The scaled masked softmax."""
