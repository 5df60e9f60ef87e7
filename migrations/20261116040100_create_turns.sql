-- A turn is one accepted message and everything the agent does to answer it. What was accepted lies on
-- its turn before it is acknowledged, and enters the transcript when the turn starts. The numbers that
-- order turns and events are taken under the conversation's row.
alter table conversations
  add column next_turn_no bigint not null default 1,
  add column next_event_seq bigint not null default 1;
alter table conversations set (fillfactor = 80);

-- The turn that alone may write at the end of this session: what others append waits for it.
alter table sessions add column turn_id uuid;

-- The place of a message within its turn: a node that writes a step again after all writes nothing.
alter table messages add column step integer;
create unique index messages_one_row_per_step on messages (tenant_id, turn_id, step) where step is not null;

--   turn_no         the order of acceptance
--   state, reason   how it stands; a turn that has ended never changes again. `detail` is for clients
--   principal       who asked; with asked_hash it tells a client's own retry
--   input           what was said, and how the model is to be asked: whoever takes the turn over has it all
--   told            what the client was told of the session when the turn was accepted
--   identity_id     who speaks, and on which platform
--   steps           messages it has put into the transcript
--   calls           the client's tools that a waiting turn waits for
--   fence           grows each time a node takes the turn; every write carries it
--   version         grows with every write: a write whose answer was lost is not made twice
--   attempt         of the model call that is under way
--   lease_until     running: when another node may take it. waiting_client: when nobody waits any longer.
--                   By the clock of the database, which all nodes share
create table turns (
  tenant_id            uuid        not null,
  id                   uuid        not null,
  conversation_id      uuid        not null,
  turn_no              bigint      not null,
  state                text        not null constraint turns_state_known
                       check (state in ('queued', 'running', 'waiting_client', 'completed', 'failed', 'cancelled',
                                        'interrupted')),
  reason               text,
  detail               text,
  agent                text        not null,
  principal            text        not null,
  asked_hash           bytea       not null,
  input                json        not null,
  told                 json        not null,
  identity_id          uuid,
  platform             text,
  start_session_id     uuid,
  end_session_id       uuid,
  steps                integer     not null default 0,
  calls                json,
  finish_reason        text,
  fence                bigint      not null default 0,
  version              bigint      not null default 0,
  attempt              integer     not null default 1,
  node                 uuid,
  lease_until          timestamptz,
  cancel_requested_at  timestamptz,
  cancel_reason        text,
  input_tokens         bigint      not null default 0,
  output_tokens        bigint      not null default 0,
  usage_estimated      boolean     not null default false,
  created_at           timestamptz not null,
  started_at           timestamptz,
  ended_at             timestamptz,
  constraint turns_pkey primary key (tenant_id, id),
  constraint turns_in_order unique (tenant_id, conversation_id, turn_no),
  constraint turns_ended_completely
    check ((state in ('completed', 'failed', 'cancelled', 'interrupted')) = (ended_at is not null)),
  constraint turns_active_are_leased check ((state in ('running', 'waiting_client')) = (lease_until is not null)),
  constraint turns_conversation_fkey foreign key (tenant_id, conversation_id)
    references conversations (tenant_id, id) on delete cascade
) with (fillfactor = 70);
-- However many nodes claim the next turn of a conversation: one.
create unique index turns_one_active on turns (tenant_id, conversation_id)
  where state in ('running', 'waiting_client');
create index turns_queued on turns (tenant_id, conversation_id, turn_no) where state = 'queued';
create index turns_running on turns (tenant_id) where state = 'running';
-- Few at any time: the sweepers read them through, whosever they are.
create index turns_due on turns (tenant_id, lease_until) where state in ('running', 'waiting_client');
create index turns_of_identity on turns (tenant_id, identity_id) where identity_id is not null;
select install_tenant_policy('turns');
grant select, insert, update, delete on turns to throughline_service;

-- What happened in a conversation, for whoever watches it: only what was committed is here, and has a
-- number. What was said lies in the transcript, and an event only names it; but the pieces of an answer
-- that is under way are here alone, in `data`.
create table events (
  tenant_id        uuid        not null,
  conversation_id  uuid        not null,
  seq              bigint      not null,
  turn_id          uuid        not null,
  attempt          integer     not null,
  kind             text        not null,
  session_id       uuid        not null,
  message_seq      bigint,
  data             json,
  created_at       timestamptz not null,
  constraint events_pkey primary key (tenant_id, conversation_id, seq),
  constraint events_conversation_fkey foreign key (tenant_id, conversation_id)
    references conversations (tenant_id, id) on delete cascade
);
create index events_of_turn on events (tenant_id, turn_id, seq);
create index events_by_age on events (tenant_id, created_at);
select install_tenant_policy('events');
grant select, insert, delete on events to throughline_service;

-- A retry of a request that became a turn attaches to the turn: there is no stored answer.
alter table idempotency add column turn_id uuid;

-- What no node works on any more, or not yet: for the sweepers, which look before they know a tenant.
-- A queued turn is among them only if nothing before it is there to start it when it ends.
create function due_turns(p_limit integer) returns table (tenant_id uuid, id uuid)
language sql stable security definer
set search_path = pg_catalog, public
as $$
  (select t.tenant_id, t.id
     from turns t
    where t.state in ('running', 'waiting_client')
      and t.lease_until <= clock_timestamp()
    order by t.lease_until
    limit p_limit)
   union all
  (select t.tenant_id, t.id
     from turns t
    where t.state = 'queued'
      and t.created_at < clock_timestamp() - interval '2 seconds'
      and not exists (select 1
                        from turns o
                       where o.tenant_id = t.tenant_id
                         and o.conversation_id = t.conversation_id
                         and o.state in ('running', 'waiting_client'))
    order by t.created_at
    limit p_limit)
$$;
select install_definer_read('turns');
alter function due_turns(integer) owner to throughline_definer;
revoke execute on function due_turns(integer) from public;
grant execute on function due_turns(integer) to throughline_service;

select install_definer_erase('turns');
select install_definer_erase('events');

create or replace function erase_tenant(p_tenant_id uuid, p_limit integer) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, public
as $$
declare
  target  text;
  erased  integer;
begin
  if not exists (select 1 from tenants where id = p_tenant_id and state = 'deleting') then
    return 0;
  end if;
  foreach target in array array['idempotency', 'api_keys', 'usage_hourly', 'issuers', 'agents',
                                'events', 'turns',
                                'messages', 'conversation_grants', 'slot_conversations', 'conversations',
                                'deliveries', 'chats', 'codes', 'code_attempts', 'home_channels',
                                'identity_presence', 'identity_moves', 'user_redirects', 'erased_people',
                                'slot_names', 'slots', 'spent_session_ids', 'retention_sweeps',
                                'identities', 'users', 'audit', 'audit_heads'] loop
    execute format(
      'delete from %1$I where tenant_id = $1 and ctid = any (array(
         select ctid from %1$I where tenant_id = $1 limit $2))', target)
      using p_tenant_id, p_limit;
    get diagnostics erased = row_count;
    if erased > 0 then
      return erased;
    end if;
  end loop;
  delete from jobs where tenant_id = p_tenant_id;
  delete from tenants where id = p_tenant_id;
  return 0;
end
$$;

-- Events are kept for a while after they happened; a job removes them.
insert into jobs (id, tenant_id, kind, run_at)
select gen_random_uuid(), id, 'expire_events', now()
  from tenants
 where state not in ('deleting', 'operator')
    on conflict on constraint jobs_once do nothing;
