"""A complete bridge, for a toy platform: lines over TCP. `nc 127.0.0.1 PORT`, and the first line is your name;
every other is a direct message to the agent. `#room text` is said in a group that all who are connected read,
and where the agent answers who calls it @bot. THROUGHLINE_URL is the service, THROUGHLINE_KEY a bridge key of
the platform tcp, BRIDGE_PORT where to listen (0: a free port). docs/bridges.md explains each step. Keep this
off networks: here everybody is who they say they are."""

import http.client
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from contextlib import suppress
from socketserver import StreamRequestHandler, ThreadingTCPServer as Server

URL = os.environ["THROUGHLINE_URL"].rstrip("/") + "/v1"
HEADERS = {"Authorization": "Bearer " + os.environ["THROUGHLINE_KEY"], "Content-Type": "application/json"}
PEOPLE = {}  # who is connected, by name


def call(method, path, body=None):
    """Status and answer. Asks the same again, with the same message_id, until an answer is final."""
    data = None if body is None else json.dumps(body).encode()
    while True:
        pause = 1
        try:
            request = urllib.request.Request(URL + path, data, HEADERS, method=method)
            with urllib.request.urlopen(request, timeout=70) as answer:
                return answer.status, json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code not in (408, 429):
                return error.code, None
            pause = min(int(error.headers.get("Retry-After") or 1), 60)
        except (OSError, http.client.HTTPException):
            pass  # whether the service has the message is not known
        time.sleep(pause)


def send(chat, name, text):
    """Whether somebody got it."""
    if chat["type"] == "dm":
        return (person := PEOPLE.get(name)) is not None and person.write(text)
    return any([person.write(f"#{chat['id']} {text}") for person in list(PEOPLE.values())])


class Person(StreamRequestHandler):
    def handle(self):
        self.name, self.writing = self.rfile.readline(300).decode(errors="replace").strip(), threading.Lock()
        if not (0 < len(self.name) <= 64 and self.name.isprintable()):
            return
        PEOPLE[self.name] = self
        with suppress(OSError):  # of a connection that is lost
            for line in self.rfile:
                self.bring(line.decode(errors="replace").strip())
        if PEOPLE.get(self.name) is self:  # not if they came back meanwhile
            del PEOPLE[self.name]

    def write(self, text):
        with suppress(OSError), self.writing:
            self.connection.sendall(text.encode() + b"\n")
            return True
        return False

    def bring(self, line):
        chat, text = {"type": "dm"}, line
        if line.startswith("#") and " " in line:
            chat["id"], text = line[1:].split(" ", 1)
            chat["type"] = "group"
        message = {"identity": f"tcp:{self.name}", "chat": chat, "text": text, "message_id": uuid.uuid4().hex,
                   "display_name": self.name, "mentioned": "@bot" in text, "wait": False}
        status, answer = call("POST", "/inbound", message)
        if status == 200:  # a command, answered at once; what the agent says comes as a delivery (202)
            send(chat, self.name, answer["reply"]["text"])
        elif status != 202:
            self.write(f"Your message was not taken ({status}).")


def deliver(delivery):
    path, lease = f"/deliveries/{delivery['id']}", {"lease": delivery["lease"]}
    name = (delivery["identity"] or ":").split(":", 1)[1]
    if send(delivery["chat"] or {"type": "dm"}, name, delivery["text"]):
        call("POST", path + "/ack", lease)
    else:
        call("POST", path + "/nack", lease | {"error": "nobody is connected", "retry": True})


Server.daemon_threads = Server.allow_reuse_address = True
server = Server(("127.0.0.1", int(os.environ.get("BRIDGE_PORT") or 0)), Person)
print(f"listening on 127.0.0.1:{server.server_address[1]}", flush=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
while True:
    status, page = call("GET", "/deliveries?platform=tcp&wait=25")
    if status != 200:
        sys.exit(f"the service refuses: {status}")
    for delivery in page["data"]:  # each of another chat: none waits for another
        threading.Thread(target=deliver, args=[delivery], daemon=True).start()
