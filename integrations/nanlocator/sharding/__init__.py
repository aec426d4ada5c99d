"""Which gradients and weights are a rank's own?"""
