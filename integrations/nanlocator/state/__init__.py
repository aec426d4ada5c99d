"""What does a re-run restore beside the weights?"""
