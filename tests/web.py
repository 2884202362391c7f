"""A web server of a test's own, in place of OGB's."""

import http.server
import threading


class Remote:
    """A web server with one file, which it may break off; `asked` has the range of each request."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.stop_after: int | None = None
        self.asked: list[str | None] = []
        remote = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                requested = self.headers["Range"]
                remote.asked.append(requested)
                begin = int(requested.removeprefix("bytes=").rstrip("-")) if requested else 0
                self.send_response(206 if requested else 200)
                self.send_header("Content-Length", str(len(remote.content) - begin))
                self.end_headers()
                self.wfile.write(remote.content[begin : remote.stop_after])

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/arxiv.zip"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> "Remote":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
