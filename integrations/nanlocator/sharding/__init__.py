"""Where are a rank's own gradients and its parts of the weights?"""
