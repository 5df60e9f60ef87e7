-- The sweepers of turns and of answers take each row on its own. A row that fails is tried again later, and
-- ends in a visible state after too many failures: it never holds up the rows behind it.
--
--   due_at     when a sweeper may look at the turn, by the clock of the database, which all nodes share:
--              queued: somebody should have started it by then; ended: whoever waits for the answer by HTTP
--              should have it by then; after a failure: the end of the backoff
--   failures   how often a sweeper failed with it
--   lost       how often its node was lost with it. A node that released it on shutdown does not count
-- Behind a long statement everybody else would wait too: then this fails, and may be run again.
set local lock_timeout = '5s';

alter table turns
  add column due_at    timestamptz,
  add column failures  integer not null default 0,
  add column lost      integer not null default 0;

-- `failed`: the answer could not become a delivery.
alter table turns
  drop constraint turns_reply_via_known,
  add constraint turns_reply_via_known check (reply_via in ('http', 'told', 'delivery', 'failed')) not valid;

-- `lease_until` changes with every write of a running turn: in an index it would make each of them a new entry
-- in every index of the table. `turns_one_active` has the few that are active, led by the tenant.
drop index turns_due;
drop index turns_running;

create or replace function due_turns(p_limit integer) returns table (tenant_id uuid, id uuid)
language sql volatile security definer
set search_path = pg_catalog, public
as $$
  -- In no order, so that nodes that look at the same time take different ones.
  (select t.tenant_id, t.id
     from turns t
    where t.state in ('running', 'waiting_client')
      and t.lease_until <= clock_timestamp()
      and (t.due_at is null or t.due_at <= clock_timestamp())
    order by random()
    limit p_limit)
   union all
  (select t.tenant_id, t.id
     from turns t
    where t.state = 'queued'
      and (t.due_at is null or t.due_at <= clock_timestamp())
      and exists (select 1
                    from tenants n
                   where n.id = t.tenant_id
                     and n.state = 'active')
      -- Only the first of a queue, by whose failures the queue is put off.
      and not exists (select 1
                        from turns f
                       where f.tenant_id = t.tenant_id
                         and f.conversation_id = t.conversation_id
                         and f.state = 'queued'
                         and f.turn_no < t.turn_no)
      and not exists (select 1
                        from turns o
                       where o.tenant_id = t.tenant_id
                         and o.conversation_id = t.conversation_id
                         and o.state in ('running', 'waiting_client'))
    order by random()
    limit p_limit)
$$;

create or replace function due_replies(p_limit integer) returns table (tenant_id uuid, id uuid)
language sql volatile security definer
set search_path = pg_catalog, public
as $$
  select t.tenant_id, t.id
    from turns t
   where t.reply_via = 'http'
     and t.ended_at is not null
     and coalesce(t.due_at, t.ended_at + interval '5 seconds') <= clock_timestamp()
   order by random()
   limit p_limit
$$;
