"""What did each module compute? transformers' debugger of underflow and overflow; ``nanlocator.transformers``
has it under the original names. docs/transformers.md has its output."""
