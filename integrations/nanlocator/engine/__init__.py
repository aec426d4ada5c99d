"""How does an integration speak with the engine? The driver, its options, the connection between ranks."""
