"""Holds a running Throughline to the official `openai` package, unchanged: one line per scenario that
passes, and an end at the first that does not.

THROUGHLINE_URL is the service, THROUGHLINE_KEY an admin key and THROUGHLINE_CHAT_KEY a chat key of a tenant
whose agent `main` has the demo model. Arguments choose the scenarios whose names contain one of them.
scripts/openai-client makes the Python to run it with.
"""

import asyncio
import os
import sys
import uuid

import httpx2  # what the client speaks HTTP with
import openai

URL = os.environ["THROUGHLINE_URL"].rstrip("/") + "/v1"
CHAT_KEY = os.environ["THROUGHLINE_CHAT_KEY"]
MODEL = "main"
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}},
}
HERMES = {"session_id", "session_key", "conversation_id", "requested_session_id"}
HERMES |= {"compressed", "reset", "turn_id", "memory_key"}
HEADERS = {
    "X-Hermes-Session-Id": "session_id",
    "X-Hermes-Session-Key": "session_key",
    "X-Throughline-Conversation-Id": "conversation_id",
    "X-Throughline-Turn-Id": "turn_id",
}

# As a newcomer makes them: with their own retries.
client = openai.OpenAI(base_url=URL, api_key=CHAT_KEY, timeout=20)
admin = openai.OpenAI(base_url=URL, api_key=os.environ["THROUGHLINE_KEY"], timeout=20)

SCENARIOS = []


class Failed(Exception):
    pass


def scenario(function):
    SCENARIOS.append(function)
    return function


def check(holds, what):
    if not holds:
        raise Failed(what)


def same(got, wanted, what):
    check(got == wanted, f"{what}: wanted {wanted!r}, got {got!r}")


def refused(error, code, call, **arguments):
    """The call raises this class with this code, and the client did not try it again in vain."""
    try:
        call(**arguments)
    except openai.APIStatusError as raised:
        same((type(raised).__name__, raised.code), (error.__name__, code), "the error")
        check(raised.body and raised.body.get("message"), "the error has no message")
        same(raised.request.headers["x-stainless-retry-count"], "0", f"retries of {code}")
        return
    raise Failed(f"nothing was raised, wanted {error.__name__} {code}")


def fresh(name):
    return f"{name}-{uuid.uuid4().hex}"


def user(text):
    return {"role": "user", "content": text}


def demo(text, count):
    return f"This is the demo model. You said: {text} (your message {count} here)"


def session(id=None, key=None):
    headers = {"X-Hermes-Session-Id": id, "X-Hermes-Session-Key": key}
    return {name: value for name, value in headers.items() if value is not None}


def ask(*messages, by=client, headers=None, **options):
    """One call: the completion, and the answer's headers."""
    messages = [user(message) if isinstance(message, str) else message for message in messages]
    create = by.chat.completions.with_raw_response.create
    raw = create(model=MODEL, messages=messages, extra_headers=headers or {}, **options)
    return raw.parse(), raw.headers


def open_stream(*messages, headers=None, **options):
    messages = [user(message) if isinstance(message, str) else message for message in messages]
    create = client.chat.completions.create
    return create(model=MODEL, messages=messages, stream=True, extra_headers=headers or {}, **options)


def text_of(stream):
    """What the plain loop reads."""
    text = ""
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
    return text


def says(completion, text):
    same(completion.choices[0].message.content, text, "the answer")
    same(completion.choices[0].finish_reason, "stop", "finish_reason")


def hermes_of(told, headers=None):
    """The member `hermes`, complete, and the same as in the headers if those are given."""
    hermes = (told.model_extra or {}).get("hermes")
    check(isinstance(hermes, dict), f"no member hermes: {told!r}")
    check(HERMES <= hermes.keys(), f"hermes lacks {sorted(HERMES - hermes.keys())}")
    same((hermes["compressed"], hermes["reset"]), (False, None), "compressed and reset")
    check(hermes["turn_id"].startswith("trn_"), f"turn_id is {hermes['turn_id']!r}")
    if headers is not None:
        for header, member in HEADERS.items():
            same(headers.get(header), hermes[member], header)
    return hermes


def stored(id):
    """The transcript, as (role, content)."""
    page = client.get(f"/sessions/{id}/messages", cast_to=object)
    return [(message["role"], message["content"]) for message in page["data"]]


@scenario
def models_are_the_agents():
    check(MODEL in [model.id for model in client.models.list()], "main is not among the models")
    model = client.models.retrieve(MODEL)
    same((model.id, model.object), (MODEL, "model"), "the model")
    refused(openai.NotFoundError, "model_not_found", client.models.retrieve, model="nobody")
    create = client.chat.completions.create
    refused(openai.NotFoundError, "model_not_found", create, model="nobody", messages=[user("hi")])


@scenario
def a_stateless_chat_answers_and_keeps_nothing():
    for _ in range(2):
        completion, headers = ask("hi")
        says(completion, demo("hi", 1))
        same(completion.model, MODEL, "model")
        usage = completion.usage
        same(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens, "total_tokens")
        check("hermes" not in (completion.model_extra or {}), "stateless, and yet a member hermes")
        told = [name for name in headers if name.lower().startswith(("x-hermes-", "x-throughline-"))]
        told = [name.lower() for name in told]
        same(told, ["x-throughline-stateless"], "session headers")
    completion, _ = ask("one", {"role": "assistant", "content": "two"}, "three")
    says(completion, demo("three", 2))


@scenario
def a_stateless_stream_is_read_with_the_plain_loop():
    same(text_of(open_stream("hi")), demo("hi", 1), "the streamed text")
    # Who asks for the usage gets one chunk more, without choices.
    chunks = list(open_stream("hi", stream_options={"include_usage": True}))
    same(chunks[-1].choices, [], "choices of the last chunk")
    check(chunks[-1].usage.total_tokens > 0, "the last chunk has no usage")
    check(all(chunk.choices and chunk.usage is None for chunk in chunks[:-1]), "usage came too early")


@scenario
def a_label_as_user_is_stateless_with_a_chat_key():
    completion, headers = ask("hi", user="telegram:5")
    says(completion, demo("hi", 1))
    check("x-hermes-session-id" not in headers, "a chat key spoke for a person")


@scenario
def a_session_id_brings_the_history():
    id = fresh("session")
    first, headers = ask("one", headers=session(id))
    says(first, demo("one", 1))
    told = hermes_of(first, headers)
    same((told["session_id"], told["conversation_id"], told["requested_session_id"]), (id, id, id), "the ids")
    second, headers = ask("two", headers=session(id))
    says(second, demo("two", 2))
    again = hermes_of(second, headers)
    same(second.hermes["session_id"], id, "response.hermes")
    check(again["turn_id"] != told["turn_id"], "two turns have one id")
    # A client that sends all it knows adds only what is new.
    third, _ = ask("two", {"role": "assistant", "content": "my own words"}, "three", headers=session(id))
    says(third, demo("three", 3))
    wanted = []
    for count, text in enumerate(["one", "two", "three"], 1):
        wanted += [("user", text), ("assistant", demo(text, count))]
    same(stored(id), wanted, "the transcript")


@scenario
def a_session_key_brings_its_current_session():
    key = fresh("key")
    first, headers = ask("one", headers=session(key=key))
    told = hermes_of(first, headers)
    same((told["session_key"], told["memory_key"], told["requested_session_id"]), (key, key, None), "the key")
    second, headers = ask("two", headers=session(key=key))
    says(second, demo("two", 2))
    same(hermes_of(second, headers)["session_id"], told["session_id"], "session_id")
    third, headers = ask("three", headers=session(told["session_id"]))
    says(third, demo("three", 3))
    same(hermes_of(third, headers)["conversation_id"], told["conversation_id"], "conversation_id")


@scenario
def an_id_of_another_key_conflicts():
    id, key = fresh("session"), fresh("key")
    first, headers = ask("one", headers=session(id, key))
    same(hermes_of(first, headers)["session_key"], key, "session_key")
    second, _ = ask("two", headers=session(id, key))
    says(second, demo("two", 2))
    other = session(id, fresh("key"))
    refused(openai.ConflictError, "session_key_mismatch", lambda: ask("three", headers=other))
    same(len(stored(id)), 4, "messages")


@scenario
def a_stream_in_a_session_is_read_with_the_plain_loop():
    id = fresh("session")
    for count, said in enumerate(["one", "two"], 1):
        stream = open_stream(said, headers=session(id))
        text, finishing = "", []
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if chunk.choices[0].finish_reason:
                finishing.append(chunk)
        same([chunk.choices[0].finish_reason for chunk in finishing], ["stop"], "finish_reason")
        same(hermes_of(finishing[0], stream.response.headers)["session_id"], id, "session_id")
        same(finishing[0].hermes["requested_session_id"], id, "chunk.hermes")
        same(text, demo(said, count), "the streamed text")
        same(stored(id)[-1], ("assistant", text), "the stored message")


@scenario
def a_stream_is_read_with_the_clients_own_helper():
    for headers in ({}, session(fresh("session"))):
        with client.chat.completions.stream(model=MODEL, messages=[user("hi")], extra_headers=headers) as stream:
            says(stream.get_final_completion(), demo("hi", 1))


@scenario
def a_tool_of_the_client_is_called_and_its_result_goes_on():
    headers = session(fresh("session"))
    messages = [user('use clock {"zone":"UTC"}')]
    completion, _ = ask(*messages, headers=headers, tools=[CLOCK])
    choice = completion.choices[0]
    same(choice.finish_reason, "tool_calls", "finish_reason")
    call = choice.message.tool_calls[0]
    same((call.function.name, call.function.arguments), ("clock", '{"zone":"UTC"}'), "the call")
    messages.append(choice.message)

    def result(id):
        return {"role": "tool", "tool_call_id": id, "content": "It is 12:34."}

    wrong = [*messages, result("call_nobody_made")]
    refused(openai.BadRequestError, "tool_call_unknown", lambda: ask(*wrong, headers=headers, tools=[CLOCK]))
    done, told = ask(*messages, result(call.id), headers=headers, tools=[CLOCK])
    says(done, "This is the demo model. The tool answered: It is 12:34.")
    same(hermes_of(done, told)["turn_id"], hermes_of(completion)["turn_id"], "the turn that goes on")


@scenario
def a_tool_call_is_streamed_in_a_session():
    headers = session(fresh("session"))
    calls, arguments = [], ""
    for chunk in open_stream('use clock {"zone":"UTC"}', headers=headers, tools=[CLOCK]):
        for call in chunk.choices[0].delta.tool_calls or []:
            calls += [call.id] if call.id else []
            arguments += call.function.arguments or ""
        last = chunk
    same((len(calls), arguments), (1, '{"zone":"UTC"}'), "the streamed call")
    same(last.choices[0].finish_reason, "tool_calls", "finish_reason")
    hermes_of(last)
    result = {"role": "tool", "tool_call_id": calls[0], "content": "It is 12:34."}
    text = text_of(open_stream(result, headers=headers, tools=[CLOCK]))
    same(text, "This is the demo model. The tool answered: It is 12:34.", "the streamed text")


@scenario
def content_may_come_in_parts():
    parts = user([{"type": "text", "text": "in"}, {"type": "text", "text": "parts"}])
    for headers in ({}, session(fresh("session"))):
        completion, _ = ask(parts, headers=headers)
        says(completion, demo("in parts", 1))


@scenario
def a_person_as_user_is_their_direct_chat():
    peer = str(uuid.uuid4().int)
    first, headers = ask("one", by=admin, user=f"telegram:{peer}")
    told = hermes_of(first, headers)
    same(told["session_key"], f"agent:main:telegram:dm:{peer}", "session_key")
    second, headers = ask("two", by=admin, user=f"telegram:{peer}")
    says(second, demo("two", 2))
    same(hermes_of(second, headers)["session_id"], told["session_id"], "session_id")


@scenario
def an_idempotency_key_makes_one_turn():
    headers = session(fresh("session")) | {"Idempotency-Key": fresh("retry")}
    first, told = ask("one", headers=headers)
    check("idempotency-replayed" not in told, "the first answer says that it is replayed")
    second, told = ask("one", headers=headers)
    same(told.get("idempotency-replayed"), "true", "Idempotency-Replayed")
    same(hermes_of(second, told)["turn_id"], hermes_of(first)["turn_id"], "turn_id")
    says(second, demo("one", 1))
    refused(openai.ConflictError, "idempotency_conflict", lambda: ask("another", headers=headers))


@scenario
def a_retry_of_the_client_attaches_to_its_turn():
    id = fresh("session")
    first, _ = ask("one", headers=session(id))
    retried, told = ask("one", headers=session(id) | {"x-stainless-retry-count": "1"})
    same(hermes_of(retried, told)["turn_id"], hermes_of(first)["turn_id"], "turn_id")
    says(retried, demo("one", 1))
    meant, _ = ask("one", headers=session(id))
    says(meant, demo("one", 2))


@scenario
def an_answer_that_is_lost_on_its_way_is_given_again():
    tries = []

    def lose_the_first(response):
        tries.append(response.headers.get("x-throughline-turn-id"))
        if len(tries) == 1:
            raise httpx2.ReadError("lost on its way")

    id = fresh("session")
    losing = openai.DefaultHttpxClient(event_hooks={"response": [lose_the_first]})
    completion, told = ask("one", by=client.with_options(http_client=losing), headers=session(id))
    says(completion, demo("one", 1))
    same(tries, [hermes_of(completion, told)["turn_id"]] * 2, "the turns of both tries")
    same(len(stored(id)), 2, "messages")


@scenario
def mistakes_raise_the_classes_one_expects():
    def refuses(error, code, by=client, headers=None):
        refused(error, code, lambda: ask("hi", by=by, headers=headers))

    refuses(openai.AuthenticationError, "unauthorized", by=client.with_options(api_key="tl_nobody"))
    refuses(openai.BadRequestError, "invalid_session_key", headers=session(key="two words"))
    refuses(openai.BadRequestError, "invalid_session_id", headers=session("../up"))
    refuses(openai.NotFoundError, "session_not_found", headers=session("ses_" + uuid.uuid4().hex))
    refuses(openai.NotFoundError, "session_key_not_found", headers=session(key="agent:main:telegram:dm:0"))
    for headers in ({}, session(fresh("session"))):
        refused(openai.BadRequestError, "invalid_request", lambda: ask(headers=headers))


@scenario
def five_streams_run_side_by_side():
    async def talk(by, name):
        answers = []
        for said in (f"{name} one", f"{name} two"):
            create = by.chat.completions.create
            stream = await create(model=MODEL, messages=[user(said)], stream=True, extra_headers=session(name))
            answers.append("".join([chunk.choices[0].delta.content or "" async for chunk in stream]))
        same(answers, [demo(f"{name} one", 1), demo(f"{name} two", 2)], "the streamed texts")

    async def all_at_once():
        async with openai.AsyncOpenAI(base_url=URL, api_key=CHAT_KEY, timeout=20) as by:
            await asyncio.gather(*(talk(by, fresh("session")) for _ in range(5)))

    asyncio.run(all_at_once())


def main():
    chosen = sys.argv[1:] or [""]
    for run in SCENARIOS:
        if not any(part in run.__name__ for part in chosen):
            continue
        name = run.__name__.replace("_", " ")
        try:
            run()
        except Failed as failed:
            sys.exit(f"FAILED: {name}: {failed}")
        except openai.OpenAIError as error:
            sys.exit(f"FAILED: {name}: {type(error).__name__}: {error}")
        print(f"ok: {name}", flush=True)


if __name__ == "__main__":
    main()
