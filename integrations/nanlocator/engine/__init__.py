"""How does an integration use the engine? The driver, its options, the connection between ranks."""
