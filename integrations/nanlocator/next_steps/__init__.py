"""What is still to do after a verdict, as of now? ``nanlocator next RUN``. It looks and changes nothing.
docs/next.md has what it looks at."""
