"""What is called, and how is it kept and executed again? Modules, kernels, custom operators, bundles."""
