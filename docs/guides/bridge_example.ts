// A Telegram bridge: docs/bridges.md explains each step. THROUGHLINE_URL is the service, THROUGHLINE_KEY a bridge key
// of the platform telegram, TELEGRAM_TOKEN the bot's token. Run it with Node 22.18 or newer: node bridge_example.ts

export {}; // a module, so that it may await
const { THROUGHLINE_URL, THROUGHLINE_KEY, TELEGRAM_TOKEN } = process.env;
const TELEGRAM = `${process.env.TELEGRAM_API ?? "https://api.telegram.org"}/bot${TELEGRAM_TOKEN}`;
const pause = (ms: number) => new Promise((done) => setTimeout(done, ms));

/** Status and answer. Sends the same again until an answer is final. */
async function call(method: string, path: string, body?: object): Promise<[number, any]> {
  for (;;) {
    let wait = 1;
    try {
      const answer = await fetch(`${THROUGHLINE_URL}/v1${path}`, {
        method,
        headers: { Authorization: `Bearer ${THROUGHLINE_KEY}`, "Content-Type": "application/json" },
        body: body && JSON.stringify(body),
        signal: AbortSignal.timeout(70_000),
      });
      const text = await answer.text();
      if (answer.status < 500 && answer.status !== 408 && answer.status !== 429)
        return [answer.status, text ? JSON.parse(text) : null];
      wait = Math.min(Number(answer.headers.get("Retry-After") ?? 1), 60);
    } catch {} // the connection was lost: message_id makes it safe to send the same again
    await pause(wait * 1000);
  }
}

async function telegram(method: string, body: object): Promise<any> {
  const answer = await fetch(`${TELEGRAM}/${method}`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  return answer.json();
}

/** Where a message was written, as Throughline names it. */
function chatOf(message: any): object {
  const id = String(message.chat.id);
  if (message.chat.type === "private") return { type: "dm", id };
  if (message.chat.type === "channel") return { type: "channel", id };
  if (message.is_topic_message) return { type: "thread", id, thread_id: String(message.message_thread_id) };
  return { type: "group", id };
}

async function bring(update: any, bot: string): Promise<void> {
  const message = update.message ?? update.edited_message;
  if (!message?.text || !message.from || message.from.is_bot) return;
  const [status, answer] = await call("POST", "/inbound", {
    identity: `telegram:${message.from.id}`,
    chat: chatOf(message),
    text: message.text,
    message_id: String(message.message_id),
    display_name: message.from.first_name.replace(/\s+/g, " ").slice(0, 100),
    mentioned: message.text.includes(`@${bot}`) || message.reply_to_message?.from?.username === bot,
    edit: update.edited_message !== undefined,
    wait: false,
  });
  if (status === 200 && answer.reply) await send(message.chat.id, answer.reply.text, message.message_thread_id);
  else if (status >= 400) console.error("not taken", message.message_id, status, answer?.code);
}

/** Whether Telegram has it. A text has at most 4096 characters there. */
async function send(chat_id: number | string, text: string, message_thread_id?: number): Promise<boolean> {
  for (const part of text.match(/[^]{1,4096}/g) ?? []) {
    const sent = await telegram("sendMessage", { chat_id, text: part, message_thread_id });
    if (!sent.ok) return false;
  }
  return true;
}

async function deliver(delivery: any): Promise<void> {
  const { id, lease, chat, identity, text } = delivery;
  const to = chat?.type === "dm" || !chat ? identity.split(":")[1] : chat.id;
  const sent = await send(to, text, chat?.thread_id && Number(chat.thread_id)).catch(() => false);
  if (sent) await call("POST", `/deliveries/${id}/ack`, { lease });
  else await call("POST", `/deliveries/${id}/nack`, { lease, error: "Telegram did not take it", retry: true });
}

async function deliverAll(): Promise<void> {
  for (;;) {
    const [status, page] = await call("GET", "/deliveries?platform=telegram&wait=25");
    if (status !== 200) throw new Error(`the service refuses: ${status}`);
    for (const delivery of page.data) void deliver(delivery); // each of another chat: none waits for another
  }
}

const bot = (await telegram("getMe", {})).result.username;
deliverAll().catch((error) => { console.error(String(error)); process.exit(1); });
for (let offset = 0; ; ) {
  const updates = await telegram("getUpdates", { offset, timeout: 25 }).catch(() => ({ result: [] }));
  if (!updates.result?.length) await pause(200);
  for (const update of updates.result ?? []) {
    await bring(update, bot);
    offset = update.update_id + 1;
  }
}
