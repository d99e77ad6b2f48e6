"""Images: batches from users, image folders, generated images."""
