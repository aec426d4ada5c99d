"""How is other code patched, and restored?"""
