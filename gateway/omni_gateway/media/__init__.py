"""Sound between clients and the bus: decoding what clients send, encoding what stages make. All of it runs in pools."""
