"""Where does a step of a plain PyTorch loop begin and end?"""
