"""What do ranks pass to each other?"""
