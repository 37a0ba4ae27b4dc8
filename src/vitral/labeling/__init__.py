"""Label images in the browser: `vitral label photos/`.

`state` is the whole work as plain data, with a function that applies an action. `journal` keeps every action on disk,
`table` reads and writes the labels for other commands, and `session` joins the three under a lock. `thumbnails`
decodes images for the page, and `application` is the thin layer of HTTP over the session.
"""
