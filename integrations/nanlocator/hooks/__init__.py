"""How is foreign code changed, and changed back?"""
