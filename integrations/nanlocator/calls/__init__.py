"""What is called, by which name, and how is it kept and executed again? Modules, kernels, bundles."""
