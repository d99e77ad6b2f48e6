"""Images: batches that users pass, folders of files, drawn images."""
